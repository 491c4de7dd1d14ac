"""`distserve report paper`: the paper's figures and tables beside what this planner says."""
