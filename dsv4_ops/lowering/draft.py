"""Lowering of the verification of drafts: reductions over the vocabulary, and one prefix sum."""

from dsv4_ops.lowering.kinds import Decompose
from dsv4_ops.reference import draft as reference

verify_draft = Decompose(reference.verify_draft)
