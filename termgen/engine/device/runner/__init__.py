"""The device half of a step. Read the modules in this order:

1. `request_state`: the permanent rows on the device, one a slot.
2. `input_batch`: a step's inputs, computed from those rows.
3. `model_runner`: a step from top to bottom; `execute` is the place to begin.
4. `async_output`: the step's tokens on their way to the host, and when the step ran.
5. `build`: a start from top to bottom; `build_runner` calls everything below.
6. `resolve`: settings that the configuration leaves to the machine.
7. `memory`: where the device's memory goes.

Skip on a first reading, the steps are right without them:

8. `dispatch`, `cuda_graphs`, `piecewise_graphs`: recorded steps. Which one fits; whole ones; ones
   that are cut at attention.
9. `warm_up`: compiles every kernel before the first request.
10. `sleep`: gives memory back while the engine sleeps.
"""
