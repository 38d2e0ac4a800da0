"""Design spaces for CPUs: what MetaSchedule's search draws its candidates from, made of its own instructions."""
