"""Which of all these? Every layout and schedule that fits, priced; the best as one value, with its reasons."""
