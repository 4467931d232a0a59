"""What proxyd and proxyrun were asked to do: options, settings, and how command lines speak."""
