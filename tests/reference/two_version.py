"""Backward passes on other weights than the forward's, written by hand.

Every function is `(fwd, bwd, x, dy) -> (y, dparams, dx)`: the forward uses the
weights `fwd`; the backward has what the forward saved, and the weights `bwd`.
NumPy only.
"""

import numpy as np


def dense(fwd, bwd, x, dy):
  """y = x k + b."""
  y = x @ fwd["kernel"] + fwd["bias"]
  grads = {"kernel": x.T @ dy, "bias": dy.sum(axis=0)}
  return y, grads, dy @ bwd["kernel"].T


def dense_relu_dense(fwd, bwd, x, dy):
  """y = relu(x a) b: the mask is the forward's."""
  hidden = np.maximum(x @ fwd["a"], 0)
  d_hidden = (dy @ bwd["b"].T) * (hidden > 0)
  grads = {"a": x.T @ d_hidden, "b": hidden.T @ dy}
  return hidden @ fwd["b"], grads, d_hidden @ bwd["a"].T


def tied(fwd, bwd, x, dy):
  """y = tanh(x w) w': one weight read twice."""
  hidden = np.tanh(x @ fwd["w"])
  dz = (dy @ bwd["w"]) * (1 - hidden**2)
  return hidden @ fwd["w"].T, {"w": x.T @ dz + dy.T @ hidden}, dz @ bwd["w"].T


def low_rank(fwd, bwd, x, dy):
  """y = x (a b): the product of weights is a weight, known in both versions."""
  d_kernel = x.T @ dy
  grads = {"a": d_kernel @ bwd["b"].T, "b": bwd["a"].T @ d_kernel}
  return x @ fwd["a"] @ fwd["b"], grads, dy @ (bwd["a"] @ bwd["b"]).T


def conv(fwd, bwd, x, dy, stride, padding, groups=1):
  """Convolution of a square kernel over NHWC, one window at a time."""
  kernel_fwd, kernel_bwd = fwd["kernel"], bwd["kernel"]
  size, outputs = kernel_fwd.shape[0], kernel_fwd.shape[-1] // groups
  channels = x.shape[-1] // groups
  edge = (padding, padding)
  padded = np.pad(x, ((0, 0), edge, edge, (0, 0)))
  d_padded, d_kernel = np.zeros_like(padded), np.zeros_like(kernel_fwd)
  y = np.zeros_like(dy)
  for i, j, g in np.ndindex(*dy.shape[1:3], groups):
    rows = slice(i * stride, i * stride + size)
    columns = slice(j * stride, j * stride + size)
    ins = slice(g * channels, (g + 1) * channels)
    outs = slice(g * outputs, (g + 1) * outputs)
    window, d_out = padded[:, rows, columns, ins], dy[:, i, j, outs]
    y[:, i, j, outs] = np.tensordot(window, kernel_fwd[..., outs], 3)
    d_kernel[..., outs] += np.einsum("nhwc,no->hwco", window, d_out)
    d_padded[:, rows, columns, ins] += np.einsum(
      "no,hwco->nhwc", d_out, kernel_bwd[..., outs]
    )
  height, width = x.shape[1:3]
  dx = d_padded[:, padding : padding + height, padding : padding + width]
  grads = {"kernel": d_kernel, "bias": dy.sum(axis=(0, 1, 2))}
  return y + fwd["bias"], grads, dx


def normalization(fwd, bwd, x, dy, axes, groups=1, epsilon=1e-6):
  """y = (x - mean) (rsqrt(var + eps) scale) + bias over groups of channels.

  The product in brackets is made first, as Flax does: y's gradient reads it
  as the forward left it, rsqrt's gradient reads the scale of now.
  """
  grouped = (*x.shape[:-1], groups, x.shape[-1] // groups)

  def mean(v):
    means = v.reshape(grouped).mean(axis=(*axes, -1), keepdims=True)
    return np.broadcast_to(means, grouped).reshape(x.shape)

  centred = x - mean(x)
  rsqrt = 1 / np.sqrt(mean(centred**2) + epsilon)
  y = centred * (rsqrt * fwd["scale"]) + fwd["bias"]
  batch = tuple(range(x.ndim - 1))
  grads = {
    "scale": (dy * centred * rsqrt).sum(axis=batch),
    "bias": dy.sum(axis=batch),
  }
  d_centred = dy * (rsqrt * fwd["scale"])
  d_rsqrt = dy * centred * bwd["scale"]
  # rsqrt' = -rsqrt^3 / 2, var' = 2 centred / n; `mean` sums over n and shares.
  dx = d_centred - mean(d_centred) - centred * mean(d_rsqrt * rsqrt**3)
  return y, grads, dx


def attention(fwd, bwd, x, dy):
  """Multi-head self-attention: y = (softmax(q k' / sqrt(d)) v) o."""
  project = lambda p: np.einsum("btc,chd->bthd", x, p["kernel"]) + p["bias"]
  query, key, value = (project(fwd[n]) for n in ("query", "key", "value"))
  root = np.sqrt(query.shape[-1])
  scores = np.einsum("bthd,bshd->bhts", query, key) / root
  shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
  shares /= shares.sum(axis=-1, keepdims=True)
  mixed = np.einsum("bhts,bshd->bthd", shares, value)
  y = np.einsum("bthd,hdc->btc", mixed, fwd["out"]["kernel"])

  d_mixed = np.einsum("btc,hdc->bthd", dy, bwd["out"]["kernel"])
  d_shares = np.einsum("bthd,bshd->bhts", d_mixed, value)
  inner = (d_shares * shares).sum(axis=-1, keepdims=True)
  d_scores = shares * (d_shares - inner) / root
  errors = {
    "query": np.einsum("bhts,bshd->bthd", d_scores, key),
    "key": np.einsum("bhts,bthd->bshd", d_scores, query),
    "value": np.einsum("bhts,bthd->bshd", shares, d_mixed),
  }
  grads = {
    name: {
      "kernel": np.einsum("btc,bthd->chd", x, error),
      "bias": error.sum(axis=(0, 1)),
    }
    for name, error in errors.items()
  }
  grads["out"] = {
    "kernel": np.einsum("bthd,btc->hdc", mixed, dy),
    "bias": dy.sum(axis=(0, 1)),
  }
  dx = sum(
    np.einsum("bthd,chd->btc", error, bwd[name]["kernel"])
    for name, error in errors.items()
  )
  return y + fwd["out"]["bias"], grads, dx


def embed(fwd, bwd, x, dy):
  """y = table[x], x whole numbers."""
  grad = np.zeros_like(bwd["embedding"])
  np.add.at(grad, x, dy)
  return fwd["embedding"][x], {"embedding": grad}, None


def standardised_dense(fwd, bwd, x, dy):
  """y = x (w - mean w) / sd w, a mean and an sd for each output."""

  def standardise(w):
    centred = w - w.mean(axis=0)
    deviation = np.sqrt((centred**2).mean(axis=0))
    return centred / deviation, deviation

  kernel_fwd, _ = standardise(fwd["w"])
  kernel_bwd, deviation = standardise(bwd["w"])
  d_kernel = x.T @ dy
  along = kernel_bwd * (d_kernel * kernel_bwd).mean(axis=0)
  grads = {"w": (d_kernel - d_kernel.mean(axis=0) - along) / deviation}
  return x @ kernel_fwd, grads, dy @ kernel_bwd.T


def quantised_dense(fwd, bwd, x, dy):
  """y = x round(w), the rounding passed straight through by the backward."""
  return x @ np.round(fwd["w"]), {"w": x.T @ dy}, dy @ np.round(bwd["w"]).T


def peculiar_dense(fwd, bwd, x, dy):
  """y = x w with a backward of its own: twice dw, three times dx."""
  return x @ fwd["w"], {"w": 2 * x.T @ dy}, 3 * dy @ bwd["w"].T


def outputs_weight(fwd, bwd, x, dy):
  """y = (x w, 2 w): the second gradient goes to the backward weights."""
  d_product, d_weight = dy
  y = (x @ fwd["w"], 2 * fwd["w"])
  return y, {"w": x.T @ d_product + 2 * d_weight}, d_product @ bwd["w"].T


def recurrent(fwd, bwd, x, dy):
  """h_t = tanh(h_(t-1) w + x_t u) from a learned h_0, for x [time, ...]."""
  start = np.broadcast_to(fwd["start"], (x.shape[1], *fwd["start"].shape))
  hidden = [start]
  for x_t in x:
    hidden.append(np.tanh(hidden[-1] @ fwd["w"] + x_t @ fwd["u"]))
  grads = {name: np.zeros_like(leaf) for name, leaf in bwd.items()}
  dx, dh = np.zeros_like(x), np.zeros_like(start)
  for t in reversed(range(len(x))):
    dz = (dy[t] + dh) * (1 - hidden[t + 1] ** 2)
    grads["w"] += hidden[t].T @ dz
    grads["u"] += x[t].T @ dz
    dx[t], dh = dz @ bwd["u"].T, dz @ bwd["w"].T
  grads["start"] = dh.sum(axis=0)
  return np.stack(hidden[1:]), grads, dx


def layers(fwd, bwd, x, dy):
  """x tanh-ed through a stack of kernels w [layer, ...]."""
  hidden = [x]
  for kernel in fwd["w"]:
    hidden.append(np.tanh(hidden[-1] @ kernel))
  grads = np.zeros_like(bwd["w"])
  for layer in reversed(range(len(grads))):
    dz = dy * (1 - hidden[layer + 1] ** 2)
    grads[layer] = hidden[layer].T @ dz
    dy = dz @ bwd["w"][layer].T
  return hidden[-1], {"w": grads}, dy


def powers(fwd, bwd, x, dy):
  """y_t = x_t w^(t+1), elementwise: the power is a weight."""
  order = np.arange(1, len(x) + 1)[:, None, None]
  grad = (dy * x * order * bwd["w"] ** (order - 1)).sum(axis=(0, 1))
  return x * fwd["w"] ** order, {"w": grad}, dy * bwd["w"] ** order


def branches(fwd, bwd, x, dy):
  """y = x a if the inputs sum to more than 0, else tanh(x b)."""
  zeros = {name: np.zeros_like(leaf) for name, leaf in bwd.items()}
  if x.sum() > 0:
    return x @ fwd["a"], {**zeros, "a": x.T @ dy}, dy @ bwd["a"].T
  y = np.tanh(x @ fwd["b"])
  dz = dy * (1 - y**2)
  return y, {**zeros, "b": x.T @ dz}, dz @ bwd["b"].T


def residual(fwd, bwd, x, dy):
  """(skip, h) becomes (skip, tanh(h w))."""
  skip, hidden = x
  y = np.tanh(hidden @ fwd["w"])
  dz = dy[1] * (1 - y**2)
  return (skip, y), {"w": hidden.T @ dz}, (dy[0], dz @ bwd["w"].T)


def masked_dense(fwd, bwd, x, dy, mask):
  """y = (x w) mask: dropout by a mask that both passes share."""
  return (
    (x @ fwd["w"]) * mask,
    {"w": x.T @ (dy * mask)},
    (dy * mask) @ bwd["w"].T,
  )
