"""A Gluon Trainer whose states can be written to a file, and read."""
import copy
from typing import Any

from ..cpu.scales import for_devices, scales_of
from ..files import replace_file
from .optimizer import with_masters
from .ranks import RanksTrainer
from .states import (
    carry_counts,
    check_order,
    check_states,
    histories_in,
    one_error,
    read_states,
    seal,
)


class TrainerFiles(RanksTrainer):
    """What the Trainer does so that training can stop and go on."""

    _optimizer: Any

    def save_states(self, fname: str) -> None:
        """Writes the optimizer with its masters, the loss scale and the counters.

        A `gluon.Trainer` can read the file, too.
        """
        self._optimizer.trainer_state = {"names": [p.name for p in self._params],
                                         "scales": [s.read() for s in scales_of(self._params)],
                                         **self._steps.state()}
        save = super().save_states

        def write(path: str) -> None:
            save(path)
            seal(path)
        replace_file(fname, write)

    def load_states(self, fname: str) -> None:
        """Takes over what `save_states` wrote, here or in a `gluon.Trainer`.

        A file that does not fit, or is damaged, is an error and changes nothing. It may hold
        MXNet's optimizers, schedulers and arrays, and the classes of this Trainer's own optimizer
        and scheduler; anything else is refused before it runs.
        """
        states, optimizer = read_states(fname, self._optimizer)
        maker = optimizer or self._optimizer
        with one_error(fname):
            check_order(fname, maker, [p.name for p in self._params])
            scales = scales_of(self._params)
            histories = histories_in(maker, len(scales))
            check_states(fname, states, maker, self._optimizer, {
                i: (p.name, None if p._data is None else p._data[0])
                for i, p in enumerate(self._params)})
        if not self._kv_initialized:
            self._init_kvstore()
        if self._params_to_init:
            self._init_params()
        updaters = [self._kvstore._updater] if self._update_on_kvstore else self._updaters
        if None in updaters:
            raise ValueError("states that servers keep cannot be loaded: make the Trainer with "
                             "update_on_kvstore=False")
        with one_error(fname):
            devices = [c.device_id for c in self._contexts]
            carry_counts(maker, devices)
            copies = [states, *(copy.deepcopy(states) for _ in updaters[1:])]
            self._steps.load(getattr(optimizer, "trainer_state", {}))
        for one, text in zip(scales, histories):
            one.write(for_devices(text, devices))
        for updater, own in zip(updaters, copies):
            updater.states, updater.states_synced = own, dict.fromkeys(own, False)
            updater.optimizer = maker
        self._ranks_checked = False
        self._optimizer = with_masters(maker)
        self._optimizer.param_dict = dict(enumerate(self._params))
