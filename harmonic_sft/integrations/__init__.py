"""Trainers of other libraries on our models; every module needs its library."""
