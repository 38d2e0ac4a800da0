"""What a program is: for now, its parameters, and the names of the annotations by which schedules speak of it."""
