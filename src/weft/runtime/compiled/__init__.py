"""Parts of segments compiled by Inductor where that is measured to be faster."""
