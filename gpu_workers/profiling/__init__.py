"""`distserve profile`: measures the steps and pulls of an instance into the planner's table."""
