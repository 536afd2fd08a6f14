"""Who holds what? Axes over ranks, and the nodes that each stage holds."""
