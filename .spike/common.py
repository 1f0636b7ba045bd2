"""Arguments of the pixel gemm, for the emulator and for a GPU."""
import ctypes, sys, math
sys.path.insert(0, __file__.rsplit("/", 1)[0])
from gen import MODES, SHAPES_OF, text

SHAPES = [(128, 2, False), (128, 2, True), (256, 1, True), (256, 1, False), (64, 2, True), (128, 1, True), (64, 2, False)]

def tile_channels(s): return (1 if s[2] else 2) * 64 * s[1]
def stage_bytes(s): return (s[0] + tile_channels(s)) * 128
def out_bytes(s, more): return (1 + more) * 2 * s[0] * 64 * s[1] * 2
def stages(s, more): return (224 * 1024 - out_bytes(s, more)) // stage_bytes(s)
def shared_bytes(s, mode):
    more = 2 if MODES[mode][0] == "kJoined" else 0
    return stages(s, more) * (stage_bytes(s) + 24) + out_bytes(s, more) + 16

class Map(ctypes.Structure):
    _fields_ = [("opaque", ctypes.c_uint64 * 16)]
class Cut(ctypes.Structure):
    _fields_ = [(n, ctypes.c_int32) for n in ("pixel_tiles", "tiles", "workers", "slots")]
class Args(ctypes.Structure):
    _fields_ = [("weight_map", Map), ("x_map", Map), ("z_map", Map), ("out_map", Map), ("addend_map", Map), ("y_map", Map),
                ("load", ctypes.c_void_p), ("norm", ctypes.c_void_p), ("partial", ctypes.c_void_p),
                ("pixels", ctypes.c_int32), ("channels", ctypes.c_int32), ("k", ctypes.c_int32), ("cut", Cut)]
class CombineArgs(ctypes.Structure):
    _fields_ = [("partial", ctypes.c_void_p), ("norm", ctypes.c_void_p), ("first", ctypes.c_void_p),
                ("second", ctypes.c_void_p), ("channels", ctypes.c_int32), ("tile_channels", ctypes.c_int32), ("cut", Cut)]

def owner(cut, tile): return ((tile + 1) * cut.workers - 1) // cut.tiles

def cut_of(s, pixels, channels, multiprocessors):
    c = Cut()
    c.pixel_tiles = -(-pixels // s[0])
    channel_tiles = -(-channels // tile_channels(s))
    c.tiles = c.pixel_tiles * channel_tiles
    c.workers = min(c.tiles, multiprocessors * (2 if s[2] else 1))
    c.slots = max(owner(c, (t + 1) * c.pixel_tiles - 1) - owner(c, t * c.pixel_tiles) + 1 for t in range(channel_tiles))
    return c, (-(-c.workers // 2) if s[2] else c.workers)
from gen import wgrad_text
class WArgs(ctypes.Structure):
    _fields_ = [("z_map", Map), ("dz_map", Map), ("load", ctypes.c_void_p), ("partial", ctypes.c_void_p)] + [(n, ctypes.c_int32) for n in ("pixels", "into", "out", "row_tiles", "column_tiles", "splits", "steps", "unused")]
class RArgs(ctypes.Structure):
    _fields_ = [("partial", ctypes.c_void_p), ("to", ctypes.c_void_p), ("count", ctypes.c_int32), ("splits", ctypes.c_int32)]
def wgrad_shared(rows): return (4 if rows == 128 else 5) * ((rows + 256) * 128 + 24)
def wgrad_cut(rows, pixels, into, out, multiprocessors):
    a = WArgs(); a.pixels, a.into, a.out = pixels, into, out
    a.row_tiles, a.column_tiles, a.steps = -(-into // rows), -(-out // 256), -(-pixels // 64)
    a.splits = min(max(1, multiprocessors // (a.row_tiles * a.column_tiles)), a.steps)
    return a
