"""The search over candidates: who gets the next trials, the job around them, and what is faster beyond noise."""
