"""Run the code of Markdown pages, and look at the training steps in them."""

import ast
import builtins
import contextlib
import inspect
import io
import pathlib
import re
import textwrap

import jax

import mpx

ROOT = pathlib.Path(__file__).parents[1]
# A block of Python, perhaps in a tab, which is indented, and perhaps followed by what
# it prints; or a diff of Python.
BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<language>python|diff)[^\n]*\n(?P<code>.*?)^(?P=indent)```$"
    r"(?:\s+^(?P=indent)```text title=\"Prints\"\n(?P<prints>.*?)^(?P=indent)```$)?",
    re.MULTILINE | re.DOTALL,
)
_ANY_BLOCK = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
_IN_A_LINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


def run_blocks(text, filename, after=lambda code, names: None):
    """Run the Python of a Markdown text from top to bottom in one namespace, and return
    that.

    The side of a diff that is taken away runs first, in a namespace of its own. Each
    block is compiled behind as many empty lines as there are lines before it, so that
    errors name those of the file. `after` is called after each block.
    """
    names = {}
    for block in BLOCK.finditer(text):
        code = "\n" * text.count("\n", 0, block.start("code")) + textwrap.dedent(
            block["code"]
        )
        if block["language"] == "diff":
            before, code = sides(code)
            exec(compile(before, filename, "exec"), dict(names))
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(code, filename, "exec"), names)
        printed = output.getvalue()
        says = block["prints"] and textwrap.dedent(block["prints"])
        assert says in (
            None,
            printed,
        ), f"{filename} says {says!r}, but the code prints {printed!r}"
        after(code, names)
    return names


def sides(diff):
    """Return the code before and after a diff, with an empty line in place of each line
    that is not in it.
    """
    lines = diff.split("\n")
    assert {line[:1] for line in lines} <= {
        "",
        " ",
        "-",
        "+",
    }, "each line of a diff begins with ' ', '-' or '+'"
    before, after = (
        ["" if line[:1] == other else line[1:] for line in lines] for other in "+-"
    )
    assert before != after
    return "\n".join(before), "\n".join(after)


def clients():
    """Return the table of other people's training loops: the cells of a row, by the
    name of each loop in the last.
    """
    lines = re.findall(
        r"^\|.*\|$",
        (ROOT / "tests" / "clients" / "README.md").read_text(),
        re.MULTILINE,
    )
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {loop: row for row in rows[2:] for loop in re.findall(r"`(\w+)`", row[-1])}


def python_of(text):
    """Return the Python of a page, both sides of its diffs included."""
    blocks = [
        (block["language"], textwrap.dedent(block["code"]))
        for block in BLOCK.finditer(text)
    ]
    return "\n".join(
        side
        for language, code in blocks
        for side in (sides(code) if language == "diff" else [code])
    )


def jits_of_training_steps(code):
    """Return the source of each `jit` of a training step: a function with such a name,
    or one that applies updates.
    """
    tree = ast.parse(code)
    functions = {
        node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
    }
    is_step = lambda name: (
        name.endswith("step")
        or (name in functions and "apply_updates" in ast.unparse(functions[name]))
    )
    decorators = [
        ast.unparse(decorator)
        for name, f in functions.items()
        if is_step(name)
        for decorator in f.decorator_list
    ]
    calls = [
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args
    ]
    wrapped = [ast.unparse(node) for node in calls if is_step(_name_of(node.args[0]))]
    return [text for text in decorators + wrapped if re.match(r"[\w.]*jit\b", text)]


def _name_of(node):
    """Return the last name of an expression, or that of a function that is called."""
    return ast.unparse(node.func if isinstance(node, ast.Call) else node).split(".")[-1]


def check_training_steps(code, names):
    """Assert that what a training step of a block returns lies in the memory of what it
    took, but for its loss.

    Arguments of a call inside of a function are not known here.
    """
    outside = [
        node
        for node in ast.parse(code).body
        if not isinstance(node, ast.FunctionDef | ast.ClassDef)
    ]
    calls = [
        node
        for part in outside
        for node in ast.walk(part)
        if isinstance(node, ast.Call)
    ]
    for name, call in {ast.unparse(call.func): call for call in calls}.items():
        if name.endswith("step") and hasattr(names.get(name), "lower"):
            keywords = {
                keyword.arg: eval(ast.unparse(keyword.value), names)
                for keyword in call.keywords
            }
            arguments = [eval(ast.unparse(argument), names) for argument in call.args]
            shardings = (
                getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(arguments)
            )
            meshes = [
                sharding.mesh
                for sharding in shardings
                if isinstance(sharding, jax.sharding.NamedSharding)
            ]
            # The block may have set it.
            with jax.set_mesh(meshes[0]) if meshes else contextlib.nullcontext():
                compiled = names[name].lower(*arguments, **keywords).compile()
            memory = getattr(
                compiled, "compiled", compiled
            ).memory_analysis()  # that of Equinox has one inside
            new = memory.output_size_in_bytes - memory.alias_size_in_bytes
            assert new < 0.05 * memory.output_size_in_bytes, (
                f"`{ast.unparse(call)}` has {new:,} new bytes of results"
            )


def code_in_lines(text):
    """Return the expressions in the lines of a page that have a call or a dictionary
    and no `...`.
    """
    found = []
    for code in _IN_A_LINE.findall(_ANY_BLOCK.sub("", text)):
        with contextlib.suppress(SyntaxError):
            nodes = list(ast.walk(ast.parse(code.strip(), mode="eval")))
            is_whole = not any(
                isinstance(node, ast.Constant) and node.value is ... for node in nodes
            )
            if is_whole and any(
                isinstance(node, ast.Call | ast.Dict) for node in nodes
            ):
                found.append(code.strip())
    return found


def run_in_lines(text, names):
    """Run the code in the lines of a page whose names the page has; of other calls of
    mpx look at the signature.

    What needs a compiler for GPUs may say that there is none.
    """
    public = {name: getattr(mpx, name) for name in dir(mpx) if name[0] != "_"}
    known = vars(builtins) | public | {"mpx": mpx} | names
    for code in code_in_lines(text):
        tree = ast.parse(code, mode="eval")
        if all(
            node.id in known for node in ast.walk(tree) if isinstance(node, ast.Name)
        ):
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    eval(code, known)
            except RuntimeError as error:
                if not str(error).startswith("The compiler for"):
                    raise
            continue
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            name = ast.unparse(call.func).removeprefix("mpx.")
            if name in public:
                options = {keyword.arg: None for keyword in call.keywords}
                inspect.signature(public[name]).bind_partial(*call.args, **options)
