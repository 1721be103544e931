from prepkit.ranks.together import main_process_first as main_process_first
from prepkit.ranks.together import together as together
from prepkit.training.preemption import save_on_sigterm as save_on_sigterm
