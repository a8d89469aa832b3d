"""Commands about the models that are kept on this host, a file each."""
