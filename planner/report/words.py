"""The texts of `distserve report paper --help`."""

DESCRIPTION = """\
The figures and tables of the DistServe paper (arXiv 2401.09670) beside what this planner says of
the same deployments, workloads and targets. Every value says where it comes from:

  measured by the authors    printed in the paper or in its artifact, or read off a figure
  simulated                  this planner's simulator, with published coefficients of that engine
  roofline                   the model's sizes and the device's rates; nothing of it was measured
  formula                    the paper's equations

Nothing is tuned to the paper's curves. Where a point differs and the reason is known, the page
says so; simulated points come with the range in which one more run would lie.
"""

EPILOG = """\
examples:
  quick start, everything (about two minutes on two cores):
    distserve report paper

  the main result, with drawings and JSON in a directory:
    distserve report paper --only fig8,fig9 --out report

  the same at 99 % attainment (appendix C), for a program:
    distserve report paper --only fig8,fig9 --target 99 --json

  a quick look, with less certain ranges:
    distserve report paper --seeds 3 --only table2

how to read the tables:
  goodput            requests per second and GPU up to which the target share meets both targets
  93.8 ±6            mean over the seeds, and where one more run would lie in 95 of 100 cases
  1.92 (1.71-2.08)   where the mean crosses the target, and the middle 90 % of single runs
  < 0.25             below the target from the lowest measured rate on
  SLO scale          both targets multiplied; the smallest one that still holds is best

exit codes: 0 reported, 2 wrong input, 130 interrupted
"""
