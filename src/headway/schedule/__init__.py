"""Who does what, when? Schedules as values, the one rule of their order, and their price in time and memory."""
