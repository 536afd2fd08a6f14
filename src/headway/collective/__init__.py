"""How do ranks talk? Groups, messages, gradients across the wire; every wait with a deadline."""
