"""What the operating system tells and takes: processes, sockets, directories, GPUs, CRIU."""
