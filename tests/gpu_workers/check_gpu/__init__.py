"""The check of a device, on the CPU, on a played GPU, and on devices with faults."""
