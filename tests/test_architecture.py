"""The shape of the package itself: who imports whom, how full rooms are, what loads when."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import layerleap

ROOT = Path(layerleap.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
STAGED = [file for file in FILES if file.relative_to(ROOT).parts[0] in layerleap.STAGES]
EXCEPTIONS = {
    ("maps/bank.py", "layerleap.lens.lens"),  # sugar: bank.lens(model)
    ("maps/bank.py", "layerleap.lens.evaluate"),  # and bank.evaluate(model, text)
    ("models/hooks/edit.py", "layerleap.act.edits.spec"),  # model.edit("L12.N34=5")
    ("lens/readings.py", "layerleap.show.web.session"),  # a link to the running debugger
    ("lens/evaluate.py", "layerleap.show.figures.evaluation"),  # the figure of its view
    ("lens/evaluate.py", "layerleap.show.report.evaluation"),  # evaluation.report(folder)
    ("study/result.py", "layerleap.show.report.report"),  # result.report(folder)
}


def name(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def _for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports(node: ast.AST) -> list[str]:
    """Every module imported when the code runs, inside functions too."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "relative imports hide the stage"
        whole = node.module == "layerleap" or (node.module or "").startswith("layerleap.")
        return [node.module or "", *(f"{node.module}.{a.name}" for a in node.names if whole)]
    inside = node.orelse if _for_types_only(node) else ast.iter_child_nodes(node)
    return [module for child in inside for module in imports(child)]


@pytest.mark.parametrize("file", STAGED, ids=name)
def test_a_stage_imports_only_from_stages_to_its_left(file):
    here = layerleap.STAGES.index(file.relative_to(ROOT).parts[0])
    for module in imports(ast.parse(file.read_text())):
        if not module.startswith("layerleap."):
            continue
        stage = module.split(".")[1]
        if any(name(file) == f and module.startswith(m) for f, m in EXCEPTIONS):
            continue
        if stage in layerleap.STAGES:
            assert layerleap.STAGES.index(stage) <= here, f"{name(file)} imports {module}"


def test_the_exceptions_are_still_needed():
    for file, module in EXCEPTIONS:
        assert any(m.startswith(module) for m in imports(ast.parse((ROOT / file).read_text())))


def test_the_walk_over_imports_sees_into_functions_and_past_types():
    code = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a\nelse:\n    import b\n"
        "def f():\n    try:\n        from c.d import e\n    except ImportError:\n        import g\n"
    )
    assert imports(ast.parse(code)) == ["typing", "b", "c.d", "g"]


@pytest.mark.parametrize("file", [f for f in FILES if f not in STAGED], ids=name)
def test_what_all_stages_share_imports_none_of_them(file):
    if name(file) in ("__init__.py", "__main__.py"):
        return
    for module in imports(ast.parse(file.read_text())):
        room = module.split(".")[1] if module.startswith("layerleap.") else ""
        more = ("extras", "results") if name(file).startswith("results/") else ()
        assert room in ("", "errors", "files", *more)


PAPERS = ROOT.parents[1] / "papers" / "layerleap_papers"
PAPER_FILES = sorted(file for file in PAPERS.rglob("*.py") if "tests" not in file.parts)
# What belongs to no stage: small, documented modules that any author of a study may need.
SHARED = ("errors", "extras", "files", "memory", "progress", "short_repr")


def is_public(module: str, attribute: str) -> bool:
    """Is a name in the `__all__` of its package, or in a module that all stages share?

    A package that lists its public names may be imported itself.
    """
    loaded = importlib.import_module(module)
    if is_namespace(module, attribute):
        return True
    if module in {f"layerleap.{each}" for each in SHARED}:
        return not attribute.startswith("_")
    return attribute in getattr(loaded, "__all__", ())


def is_namespace(module: str, attribute: str) -> bool:
    """Is a name a package of the library that lists its public names?"""
    return (ROOT.parent / module.replace(".", "/") / attribute / "__init__.pyi").is_file()


@pytest.mark.parametrize("file", PAPER_FILES, ids=lambda file: file.relative_to(PAPERS).as_posix())
def test_papers_use_public_names_of_packages_only(file):
    tree = ast.parse(file.read_text())
    packages = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("layerleap")
        for alias in node.names
        if is_namespace(node.module, alias.name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) in packages:
            assert is_public(packages[node.value.id], node.attr), f"{node.value.id}.{node.attr}"


@pytest.mark.parametrize("file", PAPER_FILES, ids=lambda file: file.relative_to(PAPERS).as_posix())
def test_papers_import_public_names_only(file):
    paper = file.relative_to(PAPERS).parts[0]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            assert not [each for each in names if each.startswith("layerleap.")]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module.split(".")[0] == "layerleap_papers":
                assert module.split(".")[1:2] in ([paper], []), module
            elif module.split(".")[0] == "layerleap":
                private = [a.name for a in node.names if not is_public(module, a.name)]
                assert not private, f"{private} of {module}"


def test_the_library_never_imports_papers():
    for file in FILES:
        assert "layerleap_papers" not in imports(ast.parse(file.read_text())).__repr__()


@pytest.mark.parametrize("file", FILES, ids=name)
def test_a_file_has_one_idea_and_says_it(file):
    text = file.read_text()
    assert ast.get_docstring(ast.parse(text))


def test_no_room_holds_more_than_about_fifteen_modules():
    rooms = {file.parent for file in FILES}
    crowded = {r.name: n for r in rooms if (n := len(list(r.glob("[!_]*.py")))) > 16}
    assert not crowded


@pytest.mark.parametrize("file", FILES, ids=name)
def test_nothing_prints(file):
    calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    assert not [
        call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"
    ]


@pytest.mark.parametrize("file", FILES, ids=name)
def test_no_pickle_is_written_or_run(file):
    """Published maps of others are pickles; they go through readers that can only make tensors."""
    tree = ast.parse(file.read_text())
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        called = ast.unparse(call.func)
        assert called not in (
            "torch.save",
            "pickle.load",
            "pickle.loads",
            "pickle.dump",
            "pickle.dumps",
        )
        if called == "torch.load":
            assert "weights_only=True" in ast.unparse(call)
    for module in imports(tree):
        assert module.split(".")[0] not in ("dill", "joblib", "cloudpickle")
        assert module != "pickle" or name(file) == "maps/imports.py"


FORWARD = {
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
    "register_backward_hook",
    "register_module_forward_hook",
    "register_module_forward_pre_hook",
}


def touches_forward(tree: ast.AST) -> list[str]:
    """Lines that hook a module, or put a forward into one or take it out."""
    lines = []
    for node in ast.walk(tree):
        named = isinstance(node, ast.Attribute) and node.attr in FORWARD
        named |= isinstance(node, ast.Name) and node.id in FORWARD
        is_set = isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(
            node.ctx, ast.Load
        )
        is_forward = (isinstance(node, ast.Attribute) and node.attr == "forward") or (
            isinstance(node, ast.Subscript) and ast.unparse(node.slice) == "'forward'"
        )
        is_call = isinstance(node, ast.Call) and any(
            isinstance(argument, ast.Constant) and argument.value == "forward"
            for argument in node.args
        )
        # Reading is allowed, by name or with `get`; pop, setattr, delattr and the like are not.
        is_call = is_call and ast.unparse(node.func).rpartition(".")[2] not in ("get", "getattr")
        if named or (is_set and is_forward) or is_call:
            lines.append(ast.unparse(node))
    return lines


@pytest.mark.parametrize("file", FILES, ids=name)
def test_only_the_hook_layer_touches_a_modules_forward(file):
    if name(file).startswith("models/hooks/"):
        return
    assert not touches_forward(ast.parse(file.read_text()))


def test_every_way_to_touch_a_forward_is_noticed():
    for code in (
        "block.register_forward_hook(f)",
        "nn.modules.module.register_module_forward_hook(f)",
        "register_forward_pre_hook(m, f)",
        "block.forward = f",
        "del block.forward",
        "block.__dict__['forward'] = f",
        "vars(block).pop('forward')",
        "own.pop('forward', None)",
        "setattr(block, 'forward', f)",
        "own.__setitem__('forward', f)",
    ):
        assert touches_forward(ast.parse(code)), code
    for code in (
        "inspect.signature(model.forward)",
        "'forward' in vars(module)",
        "own.get('forward')",
        "super().forward(x)",
        "def forward(self, x): pass",
        "x = block.forward",
    ):
        assert not touches_forward(ast.parse(code)), code


def test_public_names_are_few_and_all_there():
    assert len(layerleap.__all__) <= 65
    assert sorted(layerleap.__all__) == sorted(dir(layerleap))
    for public in layerleap.__all__:
        assert getattr(layerleap, public) is not None
    with pytest.raises(AttributeError, match="No layerleap attribute nothing"):
        _ = layerleap.nothing


def test_public_things_say_what_they_are():
    for public in layerleap.__all__:
        thing = getattr(layerleap, public)
        assert public.startswith("__") or (thing.__doc__ or "").strip(), public


@pytest.mark.parametrize("module", ["layerleap", "layerleap.show.cli.app"])
def test_importing_does_not_wait_for_torch(module):
    if importlib.util.find_spec(module) is None:
        pytest.fail(f"{module} does not exist")
    heavy = (
        "torch",
        "transformers",
        "pandas",
        "matplotlib",
        "datasets",
        "pyarrow",
        "mwparserfromhell",
    )
    code = f"import sys, {module}; print([m for m in {heavy} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
