"""What an optimizer does to one parameter."""
