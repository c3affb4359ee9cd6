"""Reads what Weights & Biases writes to disk with WANDB_MODE=offline."""

import struct

from wandb.proto import wandb_internal_pb2


def wandb_records(path):
    """Records of an offline run: protocol buffers in LevelDB's log format, behind 7 bytes."""
    data, offset, parts = path.read_bytes(), 7, b""
    while offset + 7 <= len(data):
        if 32768 - offset % 32768 < 7:  # a header does not fit into the rest of a block
            offset += 32768 - offset % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[offset : offset + 7])
        parts += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(parts)
            parts = b""
