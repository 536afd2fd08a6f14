"""How is it started? Who am I, start the processes, watch them, name the first cause of a failure."""
