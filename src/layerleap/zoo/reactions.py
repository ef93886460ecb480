"""Well-known chemical reactions: input for the bundled masked models.

In: nothing.
Out: `REACTIONS`, (name, reaction SMILES) pairs; the SMILES is "reactants>>product".

Written from textbook knowledge, since no free corpus comes with the models. Only the main product
is given, and only some of the reagents that add no atom to it.
"""

REACTIONS: tuple[tuple[str, str], ...] = (
    ("Fischer esterification, ethyl acetate", "CCO.CC(=O)O>>CCOC(C)=O"),
    ("Fischer esterification, methyl benzoate", "CO.O=C(O)c1ccccc1>>COC(=O)c1ccccc1"),
    ("acetylation to aspirin", "CC(=O)OC(C)=O.O=C(O)c1ccccc1O>>CC(=O)Oc1ccccc1C(=O)O"),
    ("acetylation to paracetamol", "CC(=O)OC(C)=O.Nc1ccc(O)cc1>>CC(=O)Nc1ccc(O)cc1"),
    ("Schotten-Baumann amide", "NCc1ccccc1.O=C(Cl)c1ccccc1>>O=C(NCc1ccccc1)c1ccccc1"),
    ("amide from an acid chloride", "C1COCCN1.CC(=O)Cl>>CC(=O)N1CCOCC1"),
    (
        "amide coupling with EDC",
        "C1CCNCC1.CCN=C=NCCCN(C)C.O=C(O)c1ccccc1>>O=C(c1ccccc1)N1CCCCC1",
    ),
    ("Suzuki coupling, biphenyl", "Brc1ccccc1.OB(O)c1ccccc1>>c1ccc(-c2ccccc2)cc1"),
    (
        "Suzuki coupling, a biaryl nitrile",
        "COc1ccc(B(O)O)cc1.N#Cc1ccc(Br)cc1>>COc1ccc(-c2ccc(C#N)cc2)cc1",
    ),
    ("Suzuki coupling of a pyridine", "Brc1cccnc1.OB(O)c1ccccc1>>c1ccc(-c2cccnc2)cc1"),
    ("Buchwald-Hartwig amination", "Brc1ccccc1.C1COCCN1>>c1ccc(N2CCOCC2)cc1"),
    ("Buchwald-Hartwig, diphenylamine", "Clc1ccccc1.Nc1ccccc1>>c1ccc(Nc2ccccc2)cc1"),
    ("Heck reaction, methyl cinnamate", "C=CC(=O)OC.Ic1ccccc1>>COC(=O)C=Cc1ccccc1"),
    ("Sonogashira coupling", "C#Cc1ccccc1.Ic1ccccc1>>C(#Cc1ccccc1)c1ccccc1"),
    ("Stille coupling", "C=C[Sn](CCCC)(CCCC)CCCC.Ic1ccccc1>>C=Cc1ccccc1"),
    (
        "Miyaura borylation",
        "Brc1ccccc1.CC1(C)OB(B2OC(C)(C)C(C)(C)O2)OC1(C)C>>CC1(C)OB(c2ccccc2)OC1(C)C",
    ),
    (
        "azide-alkyne click reaction",
        "C#Cc1ccccc1.[N-]=[N+]=NCc1ccccc1>>c1ccc(Cn2cc(-c3ccccc3)nn2)cc1",
    ),
    ("Diels-Alder, maleic anhydride", "C=CC=C.O=C1C=CC(=O)O1>>O=C1OC(=O)C2CC=CCC12"),
    ("Diels-Alder, cyclopentadiene", "C1=CCC=C1.C=CC(=O)OC>>COC(=O)C1CC2C=CC1C2"),
    (
        "Wittig olefination",
        "C=P(c1ccccc1)(c1ccccc1)c1ccccc1.O=C1CCCCC1>>C=C1CCCCC1",
    ),
    (
        "Horner-Wadsworth-Emmons olefination",
        "CCOC(=O)CP(=O)(OCC)OCC.O=Cc1ccccc1>>CCOC(=O)C=Cc1ccccc1",
    ),
    ("aldol condensation", "CC(C)=O.O=Cc1ccccc1>>CC(=O)C=Cc1ccccc1"),
    (
        "Claisen-Schmidt condensation, chalcone",
        "CC(=O)c1ccccc1.O=Cc1ccccc1>>O=C(C=Cc1ccccc1)c1ccccc1",
    ),
    ("Claisen condensation", "CCOC(C)=O.CCOC(C)=O>>CCOC(=O)CC(C)=O"),
    ("Knoevenagel condensation", "N#CCC#N.O=Cc1ccccc1>>N#CC(C#N)=Cc1ccccc1"),
    (
        "Michael addition of malonate",
        "C=CC(C)=O.CCOC(=O)CC(=O)OCC>>CCOC(=O)C(CCC(C)=O)C(=O)OCC",
    ),
    (
        "nucleophilic aromatic substitution",
        "C1CCNCC1.O=[N+]([O-])c1ccc(F)cc1>>O=[N+]([O-])c1ccc(N2CCCCC2)cc1",
    ),
    ("substitution on a pyrimidine", "Clc1ncccn1.NCc1ccccc1>>c1ccc(CNc2ncccn2)cc1"),
    ("reductive amination of an aldehyde", "CN.O=Cc1ccccc1.[BH4-].[Na+]>>CNCc1ccccc1"),
    ("reductive amination of a ketone", "C1COCCN1.O=C1CCCCC1>>C1CCC(N2CCOCC2)CC1"),
    (
        "Boc protection",
        "CC(C)(C)OC(=O)OC(=O)OC(C)(C)C.NCc1ccccc1>>CC(C)(C)OC(=O)NCc1ccccc1",
    ),
    ("Boc removal", "CC(C)(C)OC(=O)N1CCC(O)CC1.O=C(O)C(F)(F)F>>OC1CCNCC1"),
    (
        "silyl protection",
        "CC(C)(C)[Si](C)(C)Cl.OCc1ccccc1>>CC(C)(C)[Si](C)(C)OCc1ccccc1",
    ),
    (
        "Friedel-Crafts acylation",
        "CC(=O)Cl.COc1ccccc1.[Al+3].[Cl-].[Cl-].[Cl-]>>COc1ccc(C(C)=O)cc1",
    ),
    ("Friedel-Crafts alkylation", "CC(C)(C)Cl.c1ccccc1>>CC(C)(C)c1ccccc1"),
    ("Grignard addition to a ketone", "CC(=O)c1ccccc1.C[Mg]Br>>CC(C)(O)c1ccccc1"),
    ("Grignard addition to an aldehyde", "Br[Mg]c1ccccc1.O=Cc1ccccc1>>OC(c1ccccc1)c1ccccc1"),
    ("Williamson ether synthesis", "BrCc1ccccc1.Oc1ccccc1>>c1ccc(COc2ccccc2)cc1"),
    ("methylation of a phenol", "CI.N#Cc1ccc(O)cc1>>COc1ccc(C#N)cc1"),
    ("reduction of a nitro group", "COc1ccc([N+](=O)[O-])cc1.[H][H]>>COc1ccc(N)cc1"),
    ("nitration of toluene", "Cc1ccccc1.O=[N+]([O-])O>>Cc1ccc([N+](=O)[O-])cc1"),
    ("bromination of anisole", "BrBr.COc1ccccc1>>COc1ccc(Br)cc1"),
    ("Wohl-Ziegler bromination", "Cc1ccccc1.O=C1CCC(=O)N1Br>>BrCc1ccccc1"),
    ("hydrolysis of an ester", "CCOC(=O)c1ccccc1.[Na+].[OH-]>>O=C(O)c1ccccc1"),
    ("hydration of a nitrile", "N#Cc1ccccc1.O>>NC(=O)c1ccccc1"),
    ("borohydride reduction of a ketone", "CC(=O)c1ccccc1.[BH4-].[Na+]>>CC(O)c1ccccc1"),
    ("hydride reduction of an ester", "COC(=O)c1ccccc1.[AlH4-].[Li+]>>OCc1ccccc1"),
    ("oxidation of a benzylic alcohol", "O=[Mn]=O.OCc1ccc(Br)cc1>>O=Cc1ccc(Br)cc1"),
    ("hydrogenation of styrene", "C=Cc1ccccc1.[H][H]>>CCc1ccccc1"),
    ("epoxidation with a peracid", "C=Cc1ccccc1.O=C(OO)c1cccc(Cl)c1>>c1ccc(C2CO2)cc1"),
    ("Baeyer-Villiger oxidation", "O=C(OO)c1cccc(Cl)c1.O=C1CCCCC1>>O=C1CCCCCO1"),
    (
        "sulfonamide formation",
        "Cc1ccc(S(=O)(=O)Cl)cc1.NCc1ccccc1>>Cc1ccc(S(=O)(=O)NCc2ccccc2)cc1",
    ),
    ("mesylation of an alcohol", "CS(=O)(=O)Cl.OCCc1ccccc1>>CS(=O)(=O)OCCc1ccccc1"),
    ("urea from an isocyanate", "NCc1ccccc1.O=C=Nc1ccccc1>>O=C(NCc1ccccc1)Nc1ccccc1"),
    ("azide substitution", "BrCc1ccccc1.[N-]=[N+]=[N-].[Na+]>>[N-]=[N+]=NCc1ccccc1"),
    ("acid chloride formation", "O=C(O)c1ccc(F)cc1.O=S(Cl)Cl>>O=C(Cl)c1ccc(F)cc1"),
    ("Fischer indole synthesis", "NNc1ccccc1.O=C1CCCCC1>>c1ccc2c3c([nH]c2c1)CCCC3"),
    ("Paal-Knorr pyrrole synthesis", "CC(=O)CCC(C)=O.NCc1ccccc1>>Cc1ccc(C)n1Cc1ccccc1"),
    ("Mitsunobu esterification", "CC(C)O.O=C(O)c1ccccc1>>CC(C)OC(=O)c1ccccc1"),
    ("oxime formation", "NO.O=C1CCCCC1>>ON=C1CCCCC1"),
)
