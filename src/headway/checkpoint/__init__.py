"""How is a training kept? Saved under any plan, loaded under any other, or without Headway at all."""
