"""What a program is: for now, the names of the annotations by which schedules, lowering and tuning speak of it."""
