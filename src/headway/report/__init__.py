"""What happened, beside what was planned? Timelines as text and Chrome traces, the progress line, a run as a page."""
