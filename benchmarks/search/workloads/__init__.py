"""FlexFlow's six workloads (Jia et al., arXiv 1807.05358, section 8.1), as steps for so many devices."""
