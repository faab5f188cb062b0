"""What a device is, read from the driver and the operating system."""
