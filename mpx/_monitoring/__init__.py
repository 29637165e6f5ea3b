"""What `mpx.monitor` exports."""
