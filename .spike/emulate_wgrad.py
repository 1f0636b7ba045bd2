import sys; sys.argv = ["x"]
exec(open(".spike/emulate.py").read().split("import sys\nfor mode")[0])
def wcheck(rows, load, pixels, into, out):
    torch.manual_seed(0)
    z, dz = torch.randn(pixels, into).bfloat16(), torch.randn(pixels, out).bfloat16()
    ln = torch.stack([torch.randn(into), torch.rand(into) + .5, torch.rand(into) + .5, torch.randn(into)], 1)
    got = []
    for settings in (emulator.Settings("forward", "late"), emulator.Settings("random", "random", seed=7)):
        with emulator.memory():
            gz, gdz, gln = map(emulator.guarded, (z, dz, ln))
            a = wgrad_cut(rows, pixels, into, out, 6)
            partial = emulator.empty_like(torch.empty(a.splits, into, out)); to = emulator.empty_like(torch.empty(into, out, dtype=torch.bfloat16))
            a.z_map, a.dz_map, a.load, a.partial = emap(gz, 64), emap(gdz, 64), gln.data_ptr(), partial.data_ptr()
            emulator.load_shim()
            path = emulator.store.ensure([emulator._kernel_job(wgrad_text(rows, load, True), emulator.GPUS[90])])[0]
            ops.use_device.default(9, 6, emulator.GPUS[90].shared_bytes); settings.use()
            b = blob(a)
            ops.run_kernel.default(str(path), "wgrad", a.row_tiles * a.column_tiles * a.splits, 384, wgrad_shared(rows), 1, [b])
            r = RArgs(); r.partial, r.to, r.count, r.splits = partial.data_ptr(), to.data_ptr(), into * out, a.splits
            rb = blob(r)
            ops.run_kernel.default(str(path), "wgrad_reduce", -(-r.count // 256), 256, 0, 1, [rb])
            got.append(to.clone()); del gz, gdz, gln, partial, to
    assert torch.equal(got[0], got[1])
    x = torch.relu((z.float() * ln[:, 2] + ln[:, 3]).bfloat16()) if load else z
    ref = x.double().T @ dz.double()
    print(rows, load, pixels, into, out, float((got[0].double() - ref).norm() / ref.norm()))
for rows in (128, 64):
    for load in (0, 1): wcheck(rows, load, 900, 128 if rows == 128 else 64, 512)
