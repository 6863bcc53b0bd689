"""A slow, literal VeLO and Celo in numpy float64, which shares no code with the package.

Weights have the names of `celo2.velo`; the updates are those to add to the parameters.
"""

from dataclasses import dataclass, field

import numpy as np

from celo2.velo import VeloConfig

DECAYS = [float(np.float32(decay)) for decay in (0.9, 0.99, 0.999)]


@dataclass
class Tensor:
    """The accumulators of one tensor; those of decay j are the last axis's entry j."""

    shape: tuple[int, ...]
    m: np.ndarray = field(init=False)
    v: np.ndarray = field(init=False)
    row: np.ndarray = field(init=False)  # of scalars and vectors the whole second moments
    col: np.ndarray = field(init=False)

    def __post_init__(self):
        self.m, self.v = np.zeros((*self.shape, 3)), np.zeros(self.shape)
        if len(self.shape) < 2:
            self.row = self.col = np.zeros((*self.shape, 3))
            return
        *_, self.d1, self.d0 = np.argsort(self.shape, kind="stable")
        self.row = np.zeros((*np.delete(self.shape, self.d0), 3))
        self.col = np.zeros((*np.delete(self.shape, self.d1), 3))

    def absorb(self, g: np.ndarray) -> None:
        squares = g**2 + 1e-30
        matrix = len(self.shape) >= 2
        row = squares.mean(self.d0) if matrix else squares
        col = squares.mean(self.d1) if matrix else squares
        self.m, self.row, self.col = (
            np.stack([b * old[..., j] + (1 - b) * new for j, b in enumerate(DECAYS)], -1)
            for old, new in ((self.m, g), (self.row, row), (self.col, col))
        )
        self.v = DECAYS[2] * self.v + (1 - DECAYS[2]) * g**2

    def columns(self, p: np.ndarray, g: np.ndarray) -> np.ndarray:
        """The 30 normalised columns of every parameter."""
        r = (self.v + 1e-6) ** -0.5
        if len(self.shape) >= 2:
            inside = self.d1 - 1 if self.d1 > self.d0 else self.d1
            means = self.row.mean(inside, keepdims=True)
            row = np.expand_dims(self.row, self.d0)
            col = np.expand_dims(self.col, self.d1)
            scale = np.expand_dims(
                np.maximum(self.row / (means + 1e-9), 1e-9) ** -0.5, self.d0
            ) * np.expand_dims(np.maximum(self.col, 1e-9) ** -0.5, self.d1)
            last = self.m * scale
        else:
            row = col = self.row
            scale = np.maximum(self.row + 1e-9, 1e-9) ** -0.5
            last = self.m * self.row**-0.5
        one, three = [*self.shape, 1], [*self.shape, 3]
        groups = [
            g.reshape(one),
            np.clip(g, -0.1, 0.1).reshape(one),
            p.reshape(one),
            self.m,
            self.v.reshape(one),
            self.m * r.reshape(one),
            r.reshape(one),
            g.reshape(one) * scale,
            (g * r).reshape(one),
            np.broadcast_to(row, three),
            np.broadcast_to(col, three),
            np.broadcast_to((row + 1e-8) ** -0.5, three),
            np.broadcast_to((col + 1e-8) ** -0.5, three),
            last,
        ]
        x = np.concatenate(groups, -1).reshape(-1, 30)
        return x * (1e-5 + (x**2).mean(0)) ** -0.5

    def statistics(self, p: np.ndarray) -> list[float]:
        """VeLO's last twelve inputs."""

        def log_size(x):
            return 0.5 * np.clip(np.log(1e-8 + abs(10 * x)), -5, 5)

        scale = max(1e-9, (p**2).mean()) ** -0.5
        m, v = scale * self.m.reshape(-1, 3), scale * self.v.reshape(-1)
        means = m.mean(0)
        rank = np.zeros(5)
        if (longer := sum(n > 1 for n in self.shape)) < 5:
            rank[longer] = 1
        return [
            log_size(v.mean()),
            *rank,
            *(log_size(((m[:, j] - means[j]) ** 2).mean()) for j in range(3)),
            *(log_size(((v - means[j]) ** 2).mean()) for j in range(3)),
        ]


class Reference:
    """An optimizer of tensors in a dict, whose sorted names give the LSTM's rows."""

    def __init__(self, config: VeloConfig, weights, shapes, num_steps: int, scheduled: bool = True):
        self.config, self.num_steps, self.scheduled = config, num_steps, scheduled
        self.w = {name: np.asarray(w, np.float64) for name, w in weights.items()}
        self.tensors = {name: Tensor(tuple(shapes[name])) for name in sorted(shapes)}
        self.h = np.repeat(self.w["lstm.hidden"], len(shapes), 0)
        self.c = np.repeat(self.w["lstm.cell"], len(shapes), 0)
        self.n = 0
        horizon = config.loss_horizon or num_steps
        times = [10 ** (1 + i * (np.log10(horizon) - 1) / 9) for i in range(10)]
        self.decays = np.exp(-1 / np.array(times))
        self.means, self.minima = np.zeros(10), np.full(10, 999999999999.0)

    def update(self, grads, params, loss: float) -> dict[str, np.ndarray]:
        observed = self.observe(float(loss))
        grads = {k: np.clip(np.asarray(g, np.float64), -1000, 1000) for k, g in grads.items()}
        params = {k: np.asarray(p, np.float64) for k, p in params.items()}
        rows = []
        for name, tensor in self.tensors.items():
            rows.append([*self.time(), *observed])
            if self.config.optimizer == "velo":
                rows[-1] += tensor.statistics(params[name])
        self.steer(np.array(rows))
        updates = {}
        for i, (name, tensor) in enumerate(self.tensors.items()):
            p, g = params[name], grads[name]
            tensor.absorb(g)
            size = np.sqrt((p**2).mean() + 1e-9)
            mlp, factor = self.control(i)
            out = mlp_outputs(mlp, tensor.columns(p, g))
            step = out[:, 0] * np.exp(0.001 * out[:, 1]) * size * 0.001 * factor
            updates[name] = -step.reshape(tensor.shape)
        self.n += 1
        return updates

    def time(self) -> list[float]:
        fractions = (0.03, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0, 1.1)
        return [np.tanh(10 * (self.n / self.num_steps - s)) for s in fractions]

    def observe(self, loss: float) -> np.ndarray:
        """Feeds the running means, and gives the nine features of the loss."""
        seen = 1 - self.decays ** (self.n + 1)
        cap = loss if self.n == 0 else (self.means / seen).max()
        loss = min(2 * abs(cap), loss)
        self.means = self.decays * self.means + (1 - self.decays) * loss
        level = self.means / seen
        self.minima = np.minimum(self.minima, level)
        if self.n + 1 <= 2:
            return np.zeros(9)
        least = self.minima[:9]
        ratio = (level[:9] - least) / np.maximum(1e-8, level[1:] - least)
        return np.clip(ratio - 1, -1, 1)

    def steer(self, x: np.ndarray) -> None:
        """One step of the LSTM."""
        w = self.w
        most = np.maximum(x @ w["linear_1.w"] + w["linear_1.b"], 0).max(0)
        y = x @ w["linear_2.w"] + w["linear_2.b"] + most
        gates = np.concatenate([y, self.h], 1) @ w["lstm.w"] + w["lstm.b"]
        i, g, f, o = np.split(gates, 4, 1)
        self.c = sigmoid(f + 1) * self.c + sigmoid(i) * np.tanh(g)
        self.h = sigmoid(o) * np.tanh(self.c)

    def control(self, i: int) -> tuple[dict[str, np.ndarray], float]:
        """The MLP of tensor number i and the factor on its step."""
        banks = {k: self.w[k] for k in ("w0", "b0", "w1", "b1", "w2", "b2")}
        size = (self.h[i] @ self.w["step_size.w"] + self.w["step_size.b"])[0]
        if self.config.optimizer == "celo":
            factor = 0.1 * np.exp(size) if self.scheduled else 1.0
            return {name: bank[0] for name, bank in banks.items()}, factor
        controls = self.h[i] @ self.w["controls.w"] + self.w["controls.b"]
        scale = self.config.bank_scale / self.config.banks
        return {k: scale * np.tensordot(controls, bank, 1) for k, bank in banks.items()}, size


def mlp_outputs(mlp: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    for layer in (0, 1):
        x = np.maximum(x @ mlp[f"w{layer}"] + mlp[f"b{layer}"], 0)
    return x @ mlp["w2"] + mlp["b2"]


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))
