"""Models by name: short names, what is fetched from the hub, from an address or a package index, and what is kept."""
