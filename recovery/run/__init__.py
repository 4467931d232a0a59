"""`proxyrun`: the command that it starts, the proxyd that it brings along, and what it says in the end."""
