"""Fleet-level scheduling: who is found, admitted, worked on and let go, and by which thread."""
