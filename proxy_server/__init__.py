"""The device server: executes the records of a log on one device. It executes and never decides."""
