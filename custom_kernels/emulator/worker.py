"""The process in which emulated kernels run: ``python worker.py RUNTIME KERNEL JOB``. Needs nothing but ctypes.

A fault ends it with a line of JSON from the runtime; otherwise its own line says what was not written.
"""

import ctypes
import json
import sys


def main() -> None:
    runtime = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
    kernel = ctypes.CDLL(sys.argv[2])
    runtime.emu_buffer.restype = runtime.emu_unwritten.restype = ctypes.c_uint64
    runtime.emu_suspect.restype = ctypes.c_char_p
    runtime.emu_absence.restype = ctypes.c_bool
    with open(sys.argv[3], "rb") as file:
        job = json.loads(file.readline())
        buffers = job["buffers"]
        runtime.emu_begin(ctypes.c_uint64(max(size for _, _, size, _, _, _ in buffers)), job["poison"], job["seconds"])
        names, addresses = [], []
        for name, kind, size, granule, residue, filled in buffers:
            names.append(ctypes.c_char_p(name.encode()))
            address = runtime.emu_buffer(kind, ctypes.c_uint64(size), residue, granule, names[-1])
            addresses.append(address)
            if filled and size:
                memory = (ctypes.c_char * size).from_address(address)
                file.readinto(memory)
    triple = ctypes.c_uint32 * 3
    body = ctypes.cast(kernel.emu_kernel, ctypes.c_void_p)
    seed = ctypes.c_uint64(job["seed"])
    runtime.emu_run(body, triple(*job["grid"]), triple(*job["threadgroup"]), seed, job["fibers"])
    missing = {}
    with open(sys.argv[3] + ".out", "wb") as file:
        for i, (name, kind, size, *_) in enumerate(buffers):
            if kind:
                first = ctypes.c_uint64()
                count = runtime.emu_unwritten(i, ctypes.byref(first))
                if count:
                    missing[name] = (count, first.value)
                file.write(ctypes.string_at(addresses[i], size))
    site, thread = ctypes.c_uint32(), ctypes.create_string_buffer(128)
    suspect = runtime.emu_suspect(ctypes.byref(site), thread, ctypes.c_uint64(128))
    found = [suspect.decode(), site.value, json.loads(thread.value)] if suspect else None
    lane = ctypes.c_uint32()
    alone = runtime.emu_absence(ctypes.byref(lane), ctypes.byref(site), thread, ctypes.c_uint64(128))
    absent = [lane.value, site.value, json.loads(thread.value)] if alone else None
    print(json.dumps({"unwritten": missing, "suspect": found, "absent": absent}), flush=True)


if __name__ == "__main__":
    main()
