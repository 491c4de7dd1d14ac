"""`distserve profile`: measures one worker's steps and pulls into the planner's table."""
