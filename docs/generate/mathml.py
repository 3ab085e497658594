"""Formulas as MathML, which browsers draw themselves: the site fetches no script."""

from docutils.nodes import SkipNode
from docutils.utils.math.latex2mathml import tex2mathml


def inline(writer, node):
    writer.body.append(tex2mathml(node.astext(), as_block=False))
    raise SkipNode


def block(writer, node):
    writer.body.append(f'<div class="math">{tex2mathml(node.astext(), as_block=True)}</div>')
    raise SkipNode
