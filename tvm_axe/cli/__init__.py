"""The command line, `tvm-axe COMMAND`: a module for each command."""
