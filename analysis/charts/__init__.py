"""Charts of comparisons, sweeps, studies and traces, drawn with matplotlib.

Figures are laid out in inches, so that text never shrinks: more scenarios make a larger picture. Marks differ in shape
or hatching and in lightness, so that they can be distinguished in grey and by colour-blind readers.
"""

from analysis.charts import convergence
from analysis.charts.accuracy import predicted_vs_measured, spread
from analysis.charts.comparison import comparison_charts, rivals
from analysis.charts.convergence import study_charts
from analysis.charts.drawing import png, point_labels, save, save_all, svg
from analysis.charts.equal_loss import equal_loss_map
from analysis.charts.rivals_study import rivals_charts
from analysis.charts.step_phases import exposed_communication, phases, timeline
from analysis.charts.sweeps import sweep_charts
