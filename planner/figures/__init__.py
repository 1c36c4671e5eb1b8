"""The figures of a layout: bytes a device and a host hold, bytes sent, floating-point work, seconds."""
