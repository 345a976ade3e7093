"""`RigL` on the GPU: the CPU's topologies where sums are exact, and state that follows."""


def test_rigl_restructures_as_on_the_cpu(torch, snack, torch_helpers):
    results = []
    x = torch_helpers.integers((6, 20), 1)
    for device in ("cpu", "cuda"):
        model = torch_helpers.make_mlp(sizes=(20, 16), sparsity=0.5).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0)
        method = snack.RigL(0.4, update_every=1).attach(model, optimizer)
        for step in range(4):
            optimizer.zero_grad()
            dy = torch_helpers.integers((6, 16), step).to(device)
            (model(x.to(device)) * dy).sum().backward()
            optimizer.step()
        assert method.updates == 4
        results.append({k: v.cpu() for k, v in model.state_dict().items()})
    torch_helpers.assert_same(*results)


def test_rigl_moves_optimizer_state(torch, snack, torch_helpers):
    model = torch_helpers.make_mlp(sparsity=0.5, device="cuda")
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    method = snack.RigL(0.4, update_every=3).attach(model, optimizer)
    x = torch_helpers.integers((6, 20), 1, device="cuda") / 8
    target = torch_helpers.integers((6, 8), 2, device="cuda") / 8
    layer = model[0]
    addresses = [layer.values.data_ptr(), layer.packed_columns.data_ptr()]
    for _ in range(7):
        names = ("exp_avg", "exp_avg_sq")
        before = {
            n: torch_helpers.by_position(layer, optimizer.state[layer.values][n])
            for n in names
            if layer.values in optimizer.state
        }
        updates = method.updates
        torch_helpers.train_step(model, optimizer, x, target)
        if method.updates == updates or not before:
            continue
        kept = set(before["exp_avg"]) & set(torch_helpers.positions(layer).tolist())
        assert 0 < len(kept) < layer.nnz
        for n in names:
            now = torch_helpers.by_position(layer, optimizer.state[layer.values][n])
            assert all(value == 0 for place, value in now.items() if place not in kept)
    assert method.updates == 2
    assert [layer.values.data_ptr(), layer.packed_columns.data_ptr()] == addresses


def test_rigl_is_deterministic(torch, snack, torch_helpers):
    results = []
    for _ in range(2):
        layer = torch_helpers.seeded_layer(300, 200, sparsity=0.9, device="cuda")
        optimizer = torch.optim.Adam(layer.parameters())
        snack.RigL(0.3, update_every=2).attach(layer, optimizer)
        generator = torch.Generator(device="cuda").manual_seed(0)
        for _ in range(8):
            x = torch.randn(64, 300, device="cuda", generator=generator, requires_grad=True)
            optimizer.zero_grad()
            layer(x).square().sum().backward()
            optimizer.step()
        results.append(layer.state_dict())
    torch_helpers.assert_same(*results)
