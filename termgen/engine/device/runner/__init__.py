"""The device half of a step. Read the modules in this order:

1. `request_state`: the permanent rows on the device, one a slot.
2. `input_batch`: a step's inputs, computed from those rows.
3. `model_runner`: a step from top to bottom; `execute` is the place to begin.
4. `async_output`: the step's tokens on their way to the host, and when the step ran.
5. `build`: a start from top to bottom; `build_runner` calls everything below.
6. `resolve`: settings that the configuration leaves to the machine.
7. `memory`: accounting of the device's memory.

Skip on a first reading, as steps are correct without them:

8. `dispatch`, `cuda_graphs`, `piecewise_graphs`: CUDA graphs of steps. The choice of a graph; full
   graphs; piecewise graphs, cut at attention.
9. `warm_up`: compiles every kernel before the first request.
10. `sleep`: releases memory while the engine sleeps.
"""
