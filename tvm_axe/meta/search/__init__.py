"""The search over candidates: tasks, who gets the next trials, and the job around them."""
