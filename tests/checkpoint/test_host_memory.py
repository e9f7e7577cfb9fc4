"""How much memory a process may count on: of the machine or its container, divided by the processes of the run on it."""

from safetrain.checkpoint import host_memory


def test_the_tightest_limit_of_a_container_counts(tmp_path):
    root, groups = tmp_path / "cgroup", tmp_path / "groups"
    inside = root / "jobs" / "one"
    inside.mkdir(parents=True)
    (root / "jobs" / "memory.max").write_text("5000\n")
    (inside / "memory.max").write_text("max\n")
    groups.write_text("0::/jobs/one\n")
    assert host_memory._of_container(root, groups) == 5000
    (inside / "memory.max").write_text("3000\n")
    assert host_memory._of_container(root, groups) == 3000
    old = root / "memory" / "jobs"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("2000\n")
    groups.write_text("4:memory:/jobs\n0::/jobs/one\n")
    assert host_memory._of_container(root, groups) == 2000
    assert host_memory._of_container(tmp_path / "none", tmp_path / "nothing") is None


def test_it_is_divided_by_the_processes_on_this_machine(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    whole = host_memory.host_memory()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert host_memory.host_memory() == whole // 8
