"""Parts of the commands of the command line, which stand in `mpx_cli`."""
