"""What does it cost? Seconds and bytes of calls, stages and messages, on this machine or another."""
