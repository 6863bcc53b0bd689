"""PyTorch's checks of every optimizer: its state, copies and hooks."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torch_generic import (
    Problem,
    all_kwargs,
    assert_same_content,
    every_info,
    in_both_ways,
    with_names,
    without_names,
)

# PyTorch's checks give no names.
pytestmark = pytest.mark.filterwarnings("ignore:Celo2 got parameters without names")


@every_info
@in_both_ways
def test_state_dict_deterministic(info, named):
    for kwargs in all_kwargs(info):
        problem = Problem(sizes=(2, 3))
        optimizer = info.optim_cls(with_names(problem.params, named[0]), **kwargs)
        for _ in range(3):
            problem.loss()
            optimizer.step()
        other = copy.deepcopy(problem)
        fresh = info.optim_cls(with_names(other.params, named[1]), **kwargs)
        fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for _ in range(3):
            for p, o in ((problem, optimizer), (other, fresh)):
                p.loss()
                o.step()
            assert all(map(torch.equal, problem.params, other.params))
        ours, theirs = (without_names(o.state_dict()) for o in (optimizer, fresh))
        assert_same_content(ours, theirs)
        # Parameters that come twice are numbered as if they came once.
        fresh.param_groups.extend(fresh.param_groups)
        again = without_names(fresh.state_dict())
        assert again["param_groups"][-1] == ours["param_groups"][-1]


@every_info
@pytest.mark.parametrize("older", [True, False])
@in_both_ways
def test_can_load_from_to_named_state_dict(info, named, older):
    """With `older` it is test_can_load_older_state_dict: newer settings are missing."""
    model = nn.Sequential(nn.Conv2d(4, 2, 1, stride=2), nn.BatchNorm2d(2))
    x = torch.rand(1, 4, 8, 8)
    for kwargs in all_kwargs(info):
        contents, names = {}, ["0.weight", "0.bias", "1.weight", "1.bias"]
        for is_named in named:
            params = model.named_parameters() if is_named else model.parameters()
            optimizer = info.optim_cls(params, **kwargs)
            if contents:
                optimizer.load_state_dict(contents)
            for _ in range(2):
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
            contents = copy.deepcopy(optimizer.state_dict())
            for flag in info.not_og_supported_flags if older else ():
                del contents["param_groups"][0][flag]
        if any(named):
            assert contents["param_groups"][0]["param_names"] == names


@every_info
@pytest.mark.parametrize("named", [True, False])
def test_save_load_equality_with_weights_only(info, named):
    for kwargs in all_kwargs(info):
        problem = Problem(sizes=(2, 3))
        optimizer = info.optim_cls(with_names(problem.params, named), **kwargs)
        for _ in range(3):
            problem.loss()
            optimizer.step()
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        assert_same_content(torch.load(file, weights_only=True), optimizer.state_dict())


@every_info
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("after", [True, False])
def test_state_dict_pre_post_hook(info, before, after):
    optimizer = info.optim_cls(Problem().params)
    if before:
        optimizer.register_state_dict_pre_hook(lambda opt: opt.state.update(test=1))
    if after:
        optimizer.register_state_dict_post_hook(
            lambda opt, content: content | {"seen": content["state"].pop("test", None)}
        )
    content = optimizer.state_dict()
    assert content.get("seen") == (1 if before and after else None)
    assert ("test" in content["state"]) == (before and not after)


@every_info
def test_load_state_dict_pre_hook_and_prepend(info):
    optimizer = info.optim_cls(Problem().params)
    content = optimizer.state_dict()

    def change(opt, content):
        content["param_groups"][0]["lr"] = 0.002

    def replace(opt, content):
        content = copy.deepcopy(content)
        content["param_groups"][0]["lr"] = 0.003
        return content

    optimizer.register_load_state_dict_pre_hook(change)
    optimizer.load_state_dict(content)
    assert optimizer.param_groups[0]["lr"] == 0.002
    handle = optimizer.register_load_state_dict_pre_hook(replace, prepend=True)
    optimizer.load_state_dict(content)
    assert optimizer.param_groups[0]["lr"] == 0.002
    handle.remove()
    # test_load_state_dict_post_hook and test_load_state_dict_pre_post_hook
    optimizer.register_load_state_dict_pre_hook(replace)
    optimizer.register_load_state_dict_post_hook(
        lambda opt: opt.state.update(seen=opt.param_groups[0]["lr"])
    )
    optimizer.load_state_dict(content)
    assert optimizer.state["seen"] == 0.003


@every_info
def test_step_all_hooks(info):
    """And test_step_pre_hook, test_step_post_hook."""
    params, calls = [torch.ones(2)], []
    for kwargs in all_kwargs(info):
        calls.clear()
        optimizer, other = info.optim_cls(params, **kwargs), torch.optim.SGD(params)
        handles = [
            register_optimizer_step_pre_hook(lambda *_: calls.append(0)),
            register_optimizer_step_post_hook(lambda *_: calls.append(3)),
            *(o.register_step_pre_hook(lambda *_: calls.append(1)) for o in (optimizer, other)),
            *(o.register_step_post_hook(lambda *_: calls.append(2)) for o in (optimizer, other)),
        ]
        for one in (optimizer, other, optimizer):
            one.step()
        assert calls == [0, 1, 2, 3] * 3
        for handle in handles:
            handle.remove()
        optimizer.step()
        assert calls == [0, 1, 2, 3] * 3


@every_info
def test_deepcopy_copies_all_public_attrs(info):
    def attributes(optimizer):
        return {name for name in vars(optimizer) if not name.startswith("_")}

    for kwargs in all_kwargs(info):
        problem = Problem()
        optimizer = info.optim_cls(problem.params, **kwargs)
        problem.loss()
        optimizer.step()
        assert attributes(copy.deepcopy(optimizer)) == attributes(optimizer)


@every_info
def test_non_empty_state(info):
    for one in info.optim_inputs_func("cpu"):
        problem = Problem()
        optimizer = info.optim_cls(problem.params, **one.kwargs)
        problem.loss()
        optimizer.step()
        assert len(optimizer.state) == 2 and all(optimizer.state.values())
