"""What several schedules share: the operands and layouts of their products, their contexts' base classes, their loops."""
