"""What stands for numbers of Python while a step is captured."""
