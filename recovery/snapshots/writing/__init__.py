"""From host memory into stores: the process that writes, and what it is told."""
