"""Do it: cut batches, run stages, walk the schedule, keep the numbers those of one process."""
